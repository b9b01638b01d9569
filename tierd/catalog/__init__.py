"""What each tier holds, as this daemon knows it, and the decisions that follow from it."""
