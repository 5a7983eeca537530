"""What a reader of the notebooks may skip: data loading, timing, reading the hardware, records and plots."""
