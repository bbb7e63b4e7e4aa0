"""A Space of the Hugging Face hub: two methods answer questions about pictures beside the unpruned model."""

import espalier

page = espalier.explore(espalier.load("seedling"))

if __name__ == "__main__":
    page.launch()
