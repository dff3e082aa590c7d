package page

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// maxName is how much of a name is shown, in characters.
const maxName = 120

// name is one that callers chose, as it is shown.
func name(text string) string {
	shown := []rune(inspect.Printable(text))
	if len(shown) > maxName {
		return string(shown[:maxName]) + "…"
	}
	return string(shown)
}

// whole is a name that is cut where it is shown, and empty for others.
func whole(text string) string {
	if text = inspect.Printable(text); utf8.RuneCountInString(text) > maxName {
		return text
	}
	return ""
}

// number groups digits by three.
func number(n int64) string {
	digits := strconv.FormatInt(n, 10)
	sign := ""
	if n < 0 {
		sign, digits = "−", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return sign + digits
}

// perSecond has a decimal below 10.
func perSecond(rate float64) string {
	if rate = math.Round(rate*10) / 10; rate < 10 && rate != math.Trunc(rate) {
		return strconv.FormatFloat(rate, 'f', 1, 64)
	}
	return number(int64(math.Round(rate)))
}

var units = []struct {
	length time.Duration
	name   string
}{
	{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "min"}, {time.Second, "s"}, {time.Millisecond, "ms"}, {time.Microsecond, "µs"},
}

// interval is exact.
func interval(d time.Duration) string { return inUnits(d, len(units)) }

// span is rounded, to be read at a glance.
func span(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return "< 1 ms"
	case d < time.Second:
		return inUnits(d, 1)
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return inUnits(d, 1)
	}
	return inUnits(d, 2)
}

// inUnits has at most so many units, the largest first.
func inUnits(d time.Duration, atMost int) string {
	var parts []string
	for _, u := range units {
		if n := d / u.length; n > 0 {
			parts = append(parts, number(int64(n))+" "+u.name)
			d %= u.length
		}
		if len(parts) > 0 {
			atMost--
		}
		if atMost == 0 {
			break
		}
	}
	return strings.Join(parts, " ")
}

// until is a time of the database's: nil is never.
func until(s *jsonapi.Seconds) string {
	switch {
	case s == nil:
		return "never"
	case *s == 0:
		return "now"
	}
	return span(time.Duration(*s))
}
