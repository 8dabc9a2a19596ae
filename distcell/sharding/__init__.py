"""From annotations to a plan: a layout on every value, each with its reason."""
