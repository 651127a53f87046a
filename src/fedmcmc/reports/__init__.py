"""Self-contained HTML pages about runs and fits, which load nothing from the network.

A page explains each number in words, for readers who have not seen the code.
"""

from fedmcmc.reports._advice import advice as advice
from fedmcmc.reports._draws import summarize as summarize
from fedmcmc.reports._draws import table_of as table_of
from fedmcmc.reports._draws import table_of_rows as table_of_rows
from fedmcmc.reports._figures import Figure as Figure
from fedmcmc.reports._figures import can_draw as can_draw
from fedmcmc.reports._figures import figures_of as figures_of
from fedmcmc.reports._figures import histogram as histogram
from fedmcmc.reports._figures import off_even as off_even
from fedmcmc.reports._page import Page as Page
from fedmcmc.reports._runs import DATA_SETTINGS as DATA_SETTINGS
from fedmcmc.reports._runs import INTRODUCTION as INTRODUCTION
from fedmcmc.reports._runs import RUN_GLOSSARY as RUN_GLOSSARY
from fedmcmc.reports._runs import RunFacts as RunFacts
from fedmcmc.reports._runs import data_section as data_section
from fedmcmc.reports._runs import run_page as run_page
