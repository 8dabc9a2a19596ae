"""What is known of each op, in factor notation: one small file per op family, one table."""
