package policyfile

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/client"
)

const (
	maxTokens = 9_000_000_000_000
	maxSlots  = 10_000
	maxName   = 512 // bytes
)

// A reader reads values from nodes, and collects problems. After a problem it returns a zero value and goes on.
type reader struct {
	*collector
	policies map[string]*Policy // that rules may name; nil if they may name any
	names    []string           // of these, in the order of the file
}

func (r *reader) know(policies []Policy) {
	r.policies = make(map[string]*Policy, len(policies))
	for i := range policies {
		r.policies[policies[i].Name] = &policies[i]
		r.names = append(r.names, policies[i].Name)
	}
}

// wrong reports a value, and what to write in its place.
func (r *reader) wrong(f field, remedy string) {
	if f.value.kind == null {
		remedy += ", or remove the line"
	}
	r.add(f.value.at, "%s is %s: write %s", shorten(f.name), f.value.describe(), remedy)
}

// each calls read for the fields of a mapping. The remedy is for another kind of value.
func (r *reader) each(f field, remedy string, read func(field)) {
	if f.value.kind != mapping {
		r.wrong(f, remedy)
		return
	}
	for _, f := range f.value.fields {
		read(f)
	}
}

// items calls read for the elements of a list, with the name of one element.
func (r *reader) items(f field, one, remedy string, read func(field)) {
	if f.value.kind != list {
		r.wrong(f, remedy)
		return
	}
	for _, item := range f.value.items {
		read(field{name: one, at: item.at, value: item})
	}
}

// A known is a field that an object may have, with its reader.
type known struct {
	name string
	read func(field)
}

// object reads a mapping of known fields. It reports whether the value is a mapping.
func (r *reader) object(f field, what string, fields ...known) bool {
	names := make([]string, len(fields))
	for i := range fields {
		names[i] = fields[i].name
	}
	r.each(f, "its fields, each on a line of its own: "+and(names), func(f field) {
		if i := slices.Index(names, f.name); i >= 0 {
			fields[i].read(f)
		} else if near := r.nearest(f.name, names); near != "" {
			r.add(f.at, "unknown field %s: did you mean %s?", quote(f.name), near)
		} else {
			r.add(f.at, "unknown field %s: %s has %s", quote(f.name), what, and(names))
		}
	})
	return f.value.kind == mapping
}

// need reports missing fields, with examples.
func (r *reader) need(f field, what string, examples ...string) {
	var missing, remedies []string
	for _, example := range examples {
		name, _, _ := strings.Cut(example, ":")
		if f.value.get(name) == nil {
			missing = append(missing, name)
			remedies = append(remedies, example)
		}
	}
	if missing != nil {
		r.add(f.at, "%s has no %s: write %s", what, strings.Join(missing, " and no "), and(remedies))
	}
}

func (r *reader) whole(f field, most int64) int64 { return r.between(f, 0, most) }

func (r *reader) between(f field, least, most int64) int64 {
	n, err := strconv.ParseInt(f.value.text, 10, 64)
	if f.value.kind != integer || err != nil || n < least || n > most {
		r.wrong(f, fmt.Sprintf("a whole number from %d to %d, in digits", least, most))
		return 0
	}
	return n
}

func (r *reader) boolean(f field) bool {
	if f.value.kind != boolean {
		r.wrong(f, "true or false")
		return false
	}
	return strings.EqualFold(f.value.text, "true")
}

func (r *reader) span(f field) Span { return r.longSpan(f, Microsecond) }

func (r *reader) longSpan(f field, least Span) Span {
	span, ok, inRange := parseSpan(f.value.text)
	switch {
	case f.value.kind == integer && !strings.HasPrefix(f.value.text, "-"):
		r.add(f.value.at, "%s is %s, without a unit: write %[2]ss for seconds, or another of us, ms, s, m, h, d and w", f.name, f.value.describe())
	case f.value.kind != text || !ok:
		r.wrong(f, "whole numbers with units, such as 500ms, 10s, 5m, 1h30m or 30d")
	case !inRange || span < least:
		r.wrong(f, least.String()+" to 365250d, which is 1000 years")
	}
	return span
}

func (r *reader) lease(f field) Span { return r.longSpan(f, Millisecond) }

// instantPattern is stricter than package time, and agrees with other readers of RFC 3339.
var instantPattern = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})$`)

func (r *reader) instant(f field) time.Time {
	at, err := time.Parse(time.RFC3339Nano, f.value.text)
	if f.value.kind != instant && f.value.kind != text || err != nil || !instantPattern.MatchString(f.value.text) {
		r.wrong(f, "an instant to the microsecond with its zone, such as 2027-01-31T00:00:00Z or 2027-01-31T00:00:00+01:00")
		return time.Time{}
	}
	return at.UTC()
}

func (r *reader) period(f field) string {
	period, err := client.ParsePeriod(f.value.text)
	if f.value.kind != text || err != nil {
		r.wrong(f, "days, weeks, months or years, such as 7 days or 1 month, of 1 day to 1000 years")
		return ""
	}
	return period.String()
}

// timeZone reads a name that may be one of pg_timezone_names. The database knows whether it is.
func (r *reader) timeZone(f field) string {
	name := f.value.text
	isRegion := strings.Contains(name, "/") && !strings.HasPrefix(name, "posix/") && !strings.HasPrefix(name, "right/") && !strings.ContainsRune(name, 0)
	if f.value.kind != text || name != "UTC" && !isRegion {
		r.wrong(f, "UTC, or a region with a slash, such as Europe/Berlin")
		return ""
	}
	return name
}

// anchorPattern is a local time, to the microsecond.
var anchorPattern = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?)?$`)

// anchor reads a date, or a date with a time of day.
func (r *reader) anchor(f field) string {
	day, hour, hasHour := strings.Cut(f.value.text, "T")
	if !hasHour {
		hour = "00:00:00"
	}
	at, err := time.Parse(anchorLayout, day+"T"+hour)
	if f.value.kind != instant && f.value.kind != text || err != nil || at.Year() < 1 || !anchorPattern.MatchString(f.value.text) {
		r.wrong(f, "a local time without a zone, such as 2024-01-31 or 2024-01-31T09:00:00, of the years 1 to 9999")
		return ""
	}
	return anchorText(at)
}

const anchorLayout = "2006-01-02T15:04:05.999999"

// anchorText writes an anchor as a file does.
func anchorText(at time.Time) string { return strings.TrimSuffix(at.Format(anchorLayout), "T00:00:00") }

// text reads text that every reader of YAML takes for text.
func (r *reader) text(f field, remedy string) string {
	switch f.value.kind {
	case text:
		return f.value.text
	case integer, decimal, boolean, instant:
		r.add(f.value.at, "%s is %s, which is not text: write it in quotes, %q", f.name, f.value.describe(), shorten(f.value.text))
	default:
		r.wrong(f, remedy)
	}
	return ""
}

// checkName reports names and keys that the database refuses.
func (r *reader) checkName(at Position, what, name string) {
	switch {
	case name == "":
		r.add(at, "%s is empty: write 1 to %d bytes", what, maxName)
	case len(name) > maxName:
		r.add(at, "%s has %d bytes: write 1 to %d", what, len(name), maxName)
	case strings.ContainsRune(name, 0) || !utf8.ValidString(name):
		r.add(at, "%s has a character that PostgreSQL does not store, such as \\0: remove it", what)
	}
}

// checkPolicy reports a policy that the file does not have.
func (r *reader) checkPolicy(at Position, name string) {
	if _, ok := r.policies[name]; ok || r.policies == nil {
		return
	}
	if near := r.nearest(name, r.names); near != "" {
		r.add(at, "unknown policy %s: did you mean %s?", quote(name), quote(near))
	} else {
		r.add(at, "unknown policy %s: write it below policies", quote(name))
	}
}

// checkTokens reports a policy that the file does not have, or that has no tokens to take.
func (r *reader) checkTokens(at Position, name string) {
	r.checkPolicy(at, name)
	if p := r.policies[name]; p != nil && p.isSlots() {
		r.add(at, "policy %s lends slots, and has no tokens to take: write another policy", quote(name))
	}
}

// and joins names: a, b and c.
func and(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " and " + names[last]
}

// A Span is a time in microseconds, up to 1000 years. A [time.Duration] ends at 292.
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

type unit struct {
	name string
	span Span
}

// units are the units in a file, the largest first, and weeks, which String does not write.
var units = []unit{{"d", Day}, {"h", Hour}, {"m", Minute}, {"s", Second}, {"ms", Millisecond}, {"us", Microsecond}, {"w", Week}}

var (
	spanPattern = regexp.MustCompile(`^(?:[0-9]+(?:us|ms|s|m|h|d|w))+$`)
	spanPart    = regexp.MustCompile(`([0-9]+)([a-z]+)`)
)

// parseSpan reads whole numbers with units, such as 1h30m. ok reports the form, and inRange that the span has 1 microsecond to 1000
// years.
func parseSpan(text string) (span Span, ok, inRange bool) {
	if !spanPattern.MatchString(text) {
		return 0, false, false
	}
	for _, part := range spanPart.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseInt(part[1], 10, 64)
		unit := units[slices.IndexFunc(units, func(u unit) bool { return u.name == part[2] })].span // the pattern has let it pass
		if err != nil || n > int64(maxSpan/unit) {
			return 0, true, false
		}
		if span += Span(n) * unit; span > maxSpan {
			return 0, true, false
		}
	}
	return span, true, span > 0
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
func (s Span) interval() string { return strconv.FormatInt(int64(s), 10) + " microseconds" }
