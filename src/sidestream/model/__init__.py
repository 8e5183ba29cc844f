"""The language model: plain `nn.Module`s that know nothing of Lightning or Hydra."""
