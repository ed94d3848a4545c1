"""What a task measures. Classification is the one there is."""
