"""What is alive, what is kept between forward and backward, and the most that is alive in a step."""
