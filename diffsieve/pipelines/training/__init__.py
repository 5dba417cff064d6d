"""Training of the embedded mini-wan model: data, judge and training stages."""
