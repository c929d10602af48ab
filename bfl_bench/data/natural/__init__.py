"""Datasets whose clients come with the data: writers, subjects, sensors and roles, each with a test set of its own."""
