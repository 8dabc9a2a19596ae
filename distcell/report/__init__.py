"""What is printed of a plan, of a check, and of the way to a layout."""
