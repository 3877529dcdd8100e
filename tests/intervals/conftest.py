"""Examples without a deadline (a busy machine is no failure), and few enough to keep the files fast."""

from hypothesis import settings

settings.register_profile("intervals", deadline=None, max_examples=60)
settings.load_profile("intervals")
