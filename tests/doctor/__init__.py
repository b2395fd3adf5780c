"""Tests of the doctor: slow trainings whose causes are known."""
