<<<<<<< HEAD
"""Models that multi-site studies use."""
=======
"""Regression and survival models by formula."""
>>>>>>> h-f
