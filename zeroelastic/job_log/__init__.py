"""The log of an elastic job: ``event_log`` writes and reads it, ``timeline`` derives starts and restart costs."""
