"""The methods that everything is measured against."""
