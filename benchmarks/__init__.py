"""What normlab costs: ratios of two things measured alternately, and times beside what the machine can do."""
