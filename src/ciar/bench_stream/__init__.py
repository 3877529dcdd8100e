"""Time to image over shaped real sockets: every way to make a picture at every round-trip time."""
