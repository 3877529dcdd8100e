"""The cloud's side of the wire: sessions over WebSockets, health, metrics and logs. Knows no model."""
