package kit

import (
	"strings"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// KindOf tells what the answer to a spending shows.
func (s Spending) KindOf(a Spent, before Decision) string {
	switch {
	case a.Replayed && a.RetryAfter > 0:
		return "waits, replayed"
	case a.Replayed:
		return "replayed"
	case a.Shadowed:
		return "shadowed"
	case !a.Allowed && s.Function == "reserve":
		return "refused"
	case !a.Allowed:
		return "denied"
	case s.Function == "reserve" && a.RetryAfter > 0:
		return "waits"
	case s.Function == "reserve":
		return "granted at once"
	case s.Function == "acquire_up_to" && a.Taken < s.Cost:
		return "fewer"
	case s.Function == "acquire_up_to":
		return "all"
	case s.Function == "settle" && a.Remaining > before.Remaining:
		return "gave back"
	case s.Function == "charge" && a.Remaining < 0 && before.Remaining-s.Cost < a.Remaining:
		return "at the floor"
	case a.Remaining < 0:
		return "debt"
	}
	return "paid"
}

// IntervalOfDays counts whole days as such: here a day is 24 hours, whatever the time zone has.
func IntervalOfDays(m model.Micros) pgtype.Interval {
	return pgtype.Interval{Days: int32(m / Day), Microseconds: int64(m % Day), Valid: true}
}

// Is reports whether the answer is this error.
func (a *Answer) Is(code model.Error) bool {
	return a != nil && strings.Contains(a.Error, string(code))
}
