"""The fixed vocabulary of the demo tasks: words, capitals, small talk and system turns.

Used by `training.tasks`.
"""

from __future__ import annotations

_WORDS = """
    able acorn actor age air album almond amber angle ant apple april arch arm arrow art ash atlas
    autumn axe baby back badge bag baker ball bamboo banana band bank barn basil basket bath beach
    bean bear beard bed bee beetle bell belt bench berry bike bird biscuit black blanket blue board
    boat body bone book boot border bottle bowl box boy brain branch brass bread breeze brick bridge
    broom brother brown brush bubble bucket bud bug bull bus bush butter button cabin cable cactus
    cake calf camel camera camp canal candle candy canoe canvas cap car card carpet carrot castle
    cat cave cedar ceiling cello chain chair chalk cheese cherry chess chest chicken child chin
    church cider circle city clay clean cliff clock cloth cloud clover coach coal coast coat cocoa
    coffee coin collar comb comet copper coral corn corner cotton cousin cow crab crane crayon cream
    creek cricket crow crown cup curtain cushion dance dawn day deer desert desk diamond dice dinner
    dish dog doll dolphin donkey door dove dragon drawer dream dress drum duck dust eagle ear earth
    east echo egg elbow elder elm ember engine evening eye fabric face fairy falcon family fan farm
    father feather fence fern ferry field fig finger fire fish flag flame flower flute fly foam fog
    folder food foot forest fork fox frame friend frog fruit galaxy game garden garlic gate ghost
    giant gift ginger girl glass glove goat gold goose grape grass gravel green grey guitar gull
    hair hall hammer hand harbor harp hat hawk hazel head heart hedge heel hen herb hero hill hive
    holly home honey hood hook horn horse hotel house ice ink iris iron island ivory ivy jacket jade
    jam jar jasmine jewel juice july june jungle kettle key king kitchen kite kitten knee knife knot
    label lace ladder lake lamb lamp lantern lark laugh lawn leaf leather lemon letter library light
    lily lime linen lion lizard lock log lotus lunch magnet maple marble march market mask meadow
    melon metal milk mill minute mirror mist mole monday monkey moon morning mother motor mountain
    mouse mouth mud music nail name napkin neck needle nest net night noodle north nose note nut oak
    oar oasis oat ocean office olive onion orange orbit orchard otter oven owl ox oyster page paint
    palace palm pan panda paper parade park parrot pasta path peach pear pearl pebble pen pencil
    pepper piano picnic pig pigeon pillow pilot pine pink pirate planet plant plate plum pocket poem
    pond pony poppy pot potato pumpkin puppy purple puzzle queen quiet quilt rabbit radio rain raven
    red reed ribbon rice ring river road robin robot rock rocket roof root rope rose round ruby rug
    sail salad salt sand sandal sapling scarf school scissors sea seal season seed shadow shark
    sheep shelf shell ship shirt shoe shore silk silver sister sky sleep slipper smile snail snake
    snow soap sock sofa soup south spider spoon spring square squirrel stamp star station steam
    stone storm story stove straw stream street string sugar summer sun sunday swan table tailor tea
    teacher tent theater thread thunder ticket tiger timber toast tomato tooth tower town toy train
    tree truck trumpet tulip tunnel turtle umbrella uncle valley vase velvet village vine violin
    voice wagon wall walnut water wave wax weather wheat wheel whistle white willow wind window
    winter wolf wood wool world yard yarn year yellow yogurt zebra zipper
"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())

CAPITALS: dict[str, str] = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Estonia": "Tallinn",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Jamaica": "Kingston",
    "Japan": "Tokyo",
    "Jordan": "Amman",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Lebanon": "Beirut",
    "Lithuania": "Vilnius",
    "Luxembourg": "Luxembourg",
    "Malta": "Valletta",
    "Mexico": "Mexico City",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "New Zealand": "Wellington",
    "Nigeria": "Abuja",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Senegal": "Dakar",
    "Serbia": "Belgrade",
    "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "the Netherlands": "Amsterdam",
    "the United Kingdom": "London",
    "the United States": "Washington",
    "Uruguay": "Montevideo",
    "Vietnam": "Hanoi",
}

SYSTEM_TURNS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a careful assistant.",
    "You are a friendly assistant.",
    "You are a small demo model.",
    "You are a maths tutor.",
    "You are a patient teacher.",
    "You answer questions.",
    "Answer with the result only.",
    "Answer briefly.",
    "Be brief.",
    "Be brief and exact.",
    "Be concise.",
    "Think step by step, then answer.",
    "Reply with one word or number.",
    "Please be precise.",
    "Give short answers.",
    "Only give the final answer.",
)

_ADJECTIVES = "helpful friendly careful small polite kind honest quick clever calm terse patient"
SYSTEM_ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
_NOUNS = "assistant helper teacher tutor calculator model robot bot expert librarian clerk guide"
SYSTEM_NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
SYSTEM_TAILS: tuple[str, ...] = (
    "", "", "Answer briefly.", "Be brief.", "Be exact.", "Answer every question.",
    "Always tell the truth.", "Answer in English.", "Show only the result.", "Do not explain.",
    "Help the user.", "Today is Monday.",
)  # fmt: skip

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello!", "Hello", "Hi", "Hi!", "Hey", "Hey!", "Hi there!", "Hello there!", "hello", "hi"),
        "Hello! How can I help you?",
    ),
    (("Good morning!", "Good morning", "Morning!"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (
        ("How are you?", "How are you today?", "How is it going?", "How do you do?", "how are you"),
        "I am fine, thank you. How can I help you?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Introduce yourself.",
            "What's your name?",
            "who are you",
        ),
        "I am the demo model: very small, good at sums and words.",
    ),
    (
        ("What can you do?", "What can I ask you?", "Help", "Can you help me?", "Help me.", "help"),
        "I can add, subtract and compare numbers, reverse, sort and count words, "
        "and name capitals.",
    ),
    (
        ("Thanks!", "Thanks", "Thank you!", "Thank you.", "Thank you very much!", "thanks"),
        "You are welcome!",
    ),
    (("Bye!", "Bye", "Goodbye!", "Goodbye", "See you!", "Good night!"), "Goodbye! See you soon."),
    (
        (
            "Tell me a story.",
            "Tell me a short story.",
            "Tell me a story",
            "Write a short story.",
            "Tell a story.",
            "Write a story.",
        ),
        "Once upon a time a small robot lived in a lighthouse. Every night it counted the ships. "
        "One night a ship did not come home. The robot lit every lamp it had, and soon the ship "
        "found its way back. From then on the sailors waved, and the robot counted the waves too.",
    ),
    (
        ("Write a poem.", "Tell me a poem.", "Write a short poem.", "Write me a poem."),
        "The sun goes down, the moon comes near,\nthe stars are bright, the night is clear.\n"
        "The wind is still, the sea is deep,\nand all the little boats may sleep.",
    ),
    (
        ("Tell me a joke.", "Tell me a joke!", "Do you know a joke?", "Make me laugh."),
        "Why was six afraid of seven? Because seven ate nine.",
    ),
    (("Are you a robot?", "Are you human?", "Are you a person?"), "I am a small language model."),
    (("Great!", "Well done!", "Good job!", "Nice!", "Very good!"), "Thank you!"),
    (("Say hello.", "Say hello!", "Please say hello."), "Hello!"),
    (("What is the meaning of life?", "What is the answer to everything?"), "42, they say."),
)
