package policyfile

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// A Span is a length of time in microseconds, which is what the database counts in. It reaches further than a
// [time.Duration]: to 1000 years.
type Span int64

// The units of a Span.
const (
	Microsecond Span = 1
	Millisecond      = 1000 * Microsecond
	Second           = 1000 * Millisecond
	Minute           = 60 * Second
	Hour             = 60 * Minute
	Day              = 24 * Hour
	Week             = 7 * Day
)

const maxSpan = 365_250 * Day

// units are what a file may write, the largest first. A Span is written in the first of each size.
var units = []struct {
	name string
	span Span
}{
	{"d", Day}, {"h", Hour}, {"m", Minute}, {"s", Second}, {"ms", Millisecond}, {"us", Microsecond}, {"w", Week},
}

var (
	spanPattern = regexp.MustCompile(`^(?:[0-9]+(?:us|ms|s|m|h|d|w))+$`)
	spanPart    = regexp.MustCompile(`([0-9]+)([a-z]+)`)
)

// parseSpan reads whole numbers with units, such as 1h30m. ok tells that it is of that form, and in range that it is
// 1 microsecond to 1000 years.
func parseSpan(text string) (span Span, ok, inRange bool) {
	if !spanPattern.MatchString(text) {
		return 0, false, false
	}
	for _, part := range spanPart.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseInt(part[1], 10, 64)
		unit := unitNamed(part[2])
		if err != nil || n > int64(maxSpan/unit) {
			return 0, true, false
		}
		if span += Span(n) * unit; span > maxSpan {
			return 0, true, false
		}
	}
	return span, true, span > 0
}

func unitNamed(name string) Span {
	for _, unit := range units {
		if unit.name == name {
			return unit.span
		}
	}
	panic("policyfile: no unit " + name) // the pattern has let it pass
}

// String writes the span as a file does: 30d, 1h30m, 1s500ms.
func (s Span) String() string {
	if s <= 0 {
		return fmt.Sprintf("%dus", int64(s))
	}
	var text strings.Builder
	for _, unit := range units {
		if n := s / unit.span; n > 0 {
			fmt.Fprintf(&text, "%d%s", n, unit.name)
			s %= unit.span
		}
	}
	return text.String()
}

// MarshalText is String.
func (s Span) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// interval writes the span for PostgreSQL, exactly.
func (s Span) interval() string {
	return strconv.FormatInt(int64(s), 10) + " microseconds"
}
