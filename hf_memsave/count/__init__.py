"""Count the bytes that are kept between forward and backward, and the most alive at once in a step."""
