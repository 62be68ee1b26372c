"""What is wrapped in DeepSpeed: ``seams`` lists and checks it, ``wrappers`` are the methods that take its place.

``frameworks`` are wrapped along with it.
"""
