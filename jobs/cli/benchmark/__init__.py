"""The loads of `chatjobs bench`, and the figures that are measured under them."""
