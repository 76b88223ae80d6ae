"""All cases but those of resuming, so that one launch runs them."""

from tests.callbacks import cases_keras, cases_learning_rate, cases_state, cases_steps, cases_writers

CASES = {
    **cases_writers.CASES,
    **cases_keras.CASES,
    **cases_state.CASES,
    **cases_steps.CASES,
    **cases_learning_rate.CASES,
}
