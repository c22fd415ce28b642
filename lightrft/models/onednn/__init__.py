"""Linear layers on a CPU, multiplied by oneDNN where torch's own choice is slower."""
