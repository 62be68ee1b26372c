"""Sequences of what people do with checkpoints, on real engines, compared with a model after every action.

Read ``model`` first (what should be on disk), then ``world`` (the actions and what is compared), ``machine`` (how
hypothesis draws them), ``jobs`` and ``rank`` (the processes), ``campaign`` (thousands of actions).
"""
