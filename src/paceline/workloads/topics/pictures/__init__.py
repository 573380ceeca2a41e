"""Pictures of a fit, and the page that explores it."""
