"""From a plan to the program: compatible operands, reshards, collectives, local sizes."""
