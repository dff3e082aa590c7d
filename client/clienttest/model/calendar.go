package model

import (
	"path"
	"sort"
	"strings"
	"sync"
	"time"
)

// A Period is a number of months or of days, not of both.
type Period struct{ Months, Days int }

// A Calendar has a turn each Period, counted from Anchor, which is what clocks show in Zone: a time of day without a zone,
// written as one in UTC. Without a period it has no turns.
type Calendar struct {
	Period Period
	Zone   string
	Anchor time.Time
}

// IsQuota reports whether there are turns.
func (c Calendar) IsQuota() bool { return c.Period != Period{} }

// isValid reports whether there can be such a calendar.
func (c Calendar) isValid() bool {
	months, days := c.Period.Months, c.Period.Days
	return 0 <= months && months <= 12_000 && 0 <= days && days <= 365_250 && (months == 0) != (days == 0) &&
		IsZone(c.Zone) && isAnchor(c.Anchor)
}

func isAnchor(anchor time.Time) bool { return 1 <= anchor.Year() && anchor.Year() <= 9999 }

// IsZone reports whether a calendar can have a zone of this name.
func IsZone(name string) bool {
	return zone(name) != nil && (name == "UTC" || strings.Contains(name, "/") && path.Clean(name) == name &&
		!strings.HasPrefix(name, "posix/") && !strings.HasPrefix(name, "right/"))
}

var zones sync.Map // by name

// zone is nil if there is none of that name.
func zone(name string) *time.Location {
	if known, ok := zones.Load(name); ok {
		return known.(*time.Location)
	}
	location, err := time.LoadLocation(name)
	if err != nil {
		return nil
	}
	zones.Store(name, location)
	return location
}

// Turn is the instant of turn n, which may be negative. A month that has no such day has its last instead.
func (c Calendar) Turn(n int) time.Time {
	a := c.Anchor
	month := a.Month() + time.Month(n*c.Period.Months)
	day := min(a.Day(), time.Date(a.Year(), month+1, 0, 0, 0, 0, 0, time.UTC).Day()) + n*c.Period.Days
	return instant(time.Date(a.Year(), month, day, a.Hour(), a.Minute(), a.Second(), a.Nanosecond(), time.UTC), zone(c.Zone))
}

// Next is the first turn after t.
func (c Calendar) Next(t time.Time) time.Time {
	isAfter := func(n int) bool { return c.Turn(n).After(t) }
	low, high := -1, 1
	for isAfter(low) {
		low *= 2
	}
	for !isAfter(high) {
		high *= 2
	}
	return c.Turn(low + sort.Search(high-low, func(i int) bool { return isAfter(low + i) })).UTC()
}

// instant is when clocks of a zone show a time. Of two such instants it is the later. A time that clocks skip is counted from
// before they do. The search begins with the offset that holds when all zones have passed the time, and goes back.
func instant(shown time.Time, zone *time.Location) time.Time {
	for t := shown.Add(24 * time.Hour).In(zone); ; {
		_, offset := t.Zone()
		at := shown.Add(-time.Duration(offset) * time.Second)
		began, _ := t.ZoneBounds()
		if began.IsZero() || !at.Before(began) {
			return at
		}
		t = began.Add(-1)
	}
}
