"""Ways for messages to travel between device and cloud. Knows the protocol; knows no model."""
