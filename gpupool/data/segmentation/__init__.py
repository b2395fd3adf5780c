"""Images with a class for each pixel: pairs, masks and patches. Runs anywhere."""
