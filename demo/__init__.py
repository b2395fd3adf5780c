"""The notebooks executed, real photographs, and what docs/ is made of; not in the wheel."""
