"""What compression costs in quality, measured on the demo model: next-token loss and attention output."""
