"""The methods that are wrapped in DeepSpeed: ``seams`` lists and checks them, ``wrappers`` are the replacements."""
