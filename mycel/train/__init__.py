"""What a trainer needs around a step: configuration, data, models, the loop, and what it shows and saves."""
