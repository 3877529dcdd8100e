"""Real sockets over a network of given delay, bandwidth and loss, on one machine. Knows no message."""
