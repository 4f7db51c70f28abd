"""Making images: requests and answers, profiles, and which steps are taken together. No torch, no process."""
