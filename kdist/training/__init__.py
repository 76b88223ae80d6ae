"""WHAT KERAS' fit DOES NOT DO BY ITSELF: the hooks that carry a strategy through fit, evaluate and predict."""
