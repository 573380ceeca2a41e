from paceline.data.images import image_folder as image_folder
from paceline.data.samples import samples_of as samples_of
from paceline.data.tables import read_table as read_table
