"""Program in, program out: splitting, fusion of collectives."""
