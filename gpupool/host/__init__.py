"""What runs once per machine: the agent, parent of the controller and of all engines."""
