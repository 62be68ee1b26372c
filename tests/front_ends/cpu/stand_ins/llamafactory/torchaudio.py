"""Stands in for torchaudio, which LLaMA-Factory imports whatever it trains, and never uses for text."""
