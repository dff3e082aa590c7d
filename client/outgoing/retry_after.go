package outgoing

import (
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// longest is the longest pause that the database takes. What is further from now is no wait.
const longest = 365 * 24 * time.Hour

// RetryAfter returns how long an answer asks its client to wait, or 0. Retry-After of a status of 400 or more wins if it can be read,
// then Retry-After-Ms or X-Ms-Retry-After-Ms, of such a status, too. Otherwise it is the longest wait of these, of any status, which
// count if they say that nothing is left:
//
//   - RateLimit: "default";r=0;t=30 of draft-ietf-httpapi-ratelimit-headers-11, or limit=50, remaining=0, reset=30 of its draft 7
//   - RateLimit-Remaining: 0 with RateLimit-Reset: 30 of earlier drafts, also as X-RateLimit- or X-Rate-Limit-
//
// A value is a number of decimal digits with or without a fraction, an HTTP date, or a date of RFC 3339. A number up to 365 days, behind
// X- up to a day, is seconds; a number within 365 days of now is Unix time in seconds or milliseconds. Now is the answer's Date, or the
// local clock if there is no Date within 365 days of the instant. Any other value, a list, or a field that is sent twice is no wait: what
// is unclear pauses nothing.
func RetryAfter(response *http.Response) time.Duration {
	a := answer{response.Header, []time.Time{time.Now()}}
	if at, ok := date(a.field("Date")); ok {
		a.clocks = []time.Time{at, a.clocks[0]}
	}
	if response.StatusCode >= http.StatusBadRequest {
		if wait, ok := a.wait("Retry-After", a.field("Retry-After")); ok {
			return wait
		}
		for _, name := range []string{"Retry-After-Ms", "X-Ms-Retry-After-Ms"} {
			if ms, ok := number(a.field(name)); ok && ms <= longest.Seconds()*1000 {
				return seconds(ms / 1000)
			}
		}
	}
	var wait time.Duration
	untilReset := func(name, remaining, reset string) {
		if left, ok := number(remaining); ok && left == 0 {
			d, _ := a.wait(name, reset)
			wait = max(wait, d)
		}
	}
	for _, prefix := range []string{"RateLimit-", "X-RateLimit-", "X-Rate-Limit-"} {
		untilReset(prefix, a.field(prefix+"Remaining"), a.field(prefix+"Reset"))
	}
	list := quoted.ReplaceAllString(a.field("RateLimit"), "")
	if strings.Contains(list, "remaining=") {
		list = strings.ReplaceAll(list, ",", ";") // its members are of one policy
	}
	for item := range strings.SplitSeq(list, ",") {
		of := map[string]string{}
		for parameter := range strings.SplitSeq(item, ";") {
			name, value, _ := strings.Cut(strings.Trim(parameter, " \t"), "=")
			of[name] = value
		}
		untilReset("RateLimit", of["r"], of["t"])
		untilReset("RateLimit", of["remaining"], of["reset"])
	}
	return wait
}

// An answer has clocks, the first of which that is near an instant measures it.
type answer struct {
	header http.Header
	clocks []time.Time
}

// field is what HTTP makes of several lines.
func (a answer) field(name string) string { return strings.Join(a.header.Values(name), ", ") }

// wait reads seconds, or an instant.
func (a answer) wait(name, text string) (time.Duration, bool) {
	var instants []float64
	if n, ok := number(text); ok {
		most := longest
		if strings.HasPrefix(name, "X-") {
			most = 24 * time.Hour // no standard says seconds: 600000 has been seen for milliseconds
		}
		if n <= most.Seconds() {
			return seconds(n), true
		}
		instants = []float64{n, n / 1000}
	} else if at, ok := date(text); ok {
		instants = []float64{float64(at.UnixMilli()) / 1000}
	}
	for _, now := range a.clocks {
		for _, at := range instants {
			if wait := at - float64(now.UnixMilli())/1000; math.Abs(wait) <= longest.Seconds() {
				return seconds(max(0, wait)), true
			}
		}
	}
	return 0, false
}

var (
	digits = regexp.MustCompile(`^[ \t]*(\d+(?:\.\d+)?)[ \t]*$`)
	quoted = regexp.MustCompile(`"(?:[^"\\]|\\.?)*"?`)
)

func number(text string) (float64, bool) {
	match := digits.FindStringSubmatch(text)
	if match == nil {
		return 0, false
	}
	n, err := strconv.ParseFloat(match[1], 64)
	return n, err == nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// date reads the three forms of an HTTP date, and RFC 3339 with or without seconds.
func date(text string) (time.Time, bool) {
	for _, layout := range []string{http.TimeFormat, "Monday, 02-Jan-06 15:04:05 GMT", time.ANSIC, time.RFC3339, "2006-01-02T15:04Z07:00"} {
		if at, err := time.Parse(layout, strings.Trim(text, " \t")); err == nil {
			return at, true
		}
	}
	return time.Time{}, false
}
