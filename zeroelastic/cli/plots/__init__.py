"""Pictures of plans and timelines; they need matplotlib."""
