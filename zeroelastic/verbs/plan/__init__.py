"""What a change of the world size would move and cost: ``forecast``."""
