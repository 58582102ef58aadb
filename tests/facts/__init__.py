"""How a correct prefix cache behaves: each rule, example and fault, tied to the tests that show it."""
