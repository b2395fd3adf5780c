"""What a user can choose, checked and explained: of pools and of trainings. Runs anywhere."""
