"""What runs once per machine: the starter, parent of the controller and of all engines."""
