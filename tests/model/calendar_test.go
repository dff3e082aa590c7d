package model_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
)

var (
	daily   = model.Period{Days: 1}
	monthly = model.Period{Months: 1}
)

// Each turn is where PostgreSQL has it, to the microsecond, and is the next one until then.
func TestCalendar(t *testing.T) {
	t.Parallel()
	for _, c := range vectors.Turns {
		calendar := model.Calendar{Period: model.Period(c.Period), Zone: c.Zone, Anchor: c.Anchor}
		name := fmt.Sprintf("%+v", c)
		require.Equal(t, c.At, calendar.Turn(c.N).UTC(), name)
		require.Equal(t, c.At, calendar.Next(c.At.Add(-time.Microsecond)), name)
		require.True(t, calendar.Next(c.At).After(c.At), name)
		require.Contains(t, []time.Time{calendar.Turn(c.N + 1).UTC(), calendar.Turn(c.N + 2).UTC()}, calendar.Next(c.At), name)
	}
}

func TestQuota_Arguments(t *testing.T) {
	t.Parallel()
	for name, def := range map[string]model.Definition{
		"no capacity":          {Period: &daily},
		"refill":               {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Refill: new(int64(1))}},
		"every":                {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Every: new(second)}},
		"stepped":              {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1))}, Stepped: new(false)},
		"no period":            {Period: &model.Period{}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"months and days":      {Period: &model.Period{Months: 1, Days: 1}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"backwards":            {Period: &model.Period{Days: -1}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"more than 1000 years": {Period: &model.Period{Months: 12_001}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"an abbreviation":      {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Zone: new("CET")}},
		"no zone":              {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Zone: new("Europe/Atlantis")}},
		"a zone by its path":   {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Zone: new("Europe/./Berlin")}},
		"a zone of leap seconds": {Period: &daily, Numbers: model.Numbers{
			Capacity: new(int64(1)), Zone: new("right/Europe/Berlin"),
		}},
		"year 10000": {Period: &daily, Numbers: model.Numbers{
			Capacity: new(int64(1)), Anchor: new(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)),
		}},
		"zone of a policy that refills":   {Numbers: model.Numbers{Capacity: new(int64(1)), Refill: new(int64(1)), Every: new(second), Zone: new("UTC")}},
		"anchor of a policy that refills": {Numbers: model.Numbers{Capacity: new(int64(1)), Refill: new(int64(1)), Every: new(second), Anchor: &t0}},
	} {
		require.ErrorIs(t, model.New().Define("p", def), model.InvalidArgument, name)
	}

	m := newModel(t)
	require.NoError(t, m.Define("quota", model.Definition{Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1))}}))
	for name, def := range map[string]model.Definition{
		"user":  {Period: &daily},
		"org":   {Numbers: model.Numbers{Zone: new("UTC")}},
		"quota": {Numbers: model.Numbers{Refill: new(int64(0))}},
	} {
		require.ErrorIs(t, m.Define(name, def), model.InvalidArgument, name)
	}
	for name, n := range map[string]model.Numbers{
		"user":  {Zone: new("UTC")},
		"org":   {Anchor: &t0},
		"quota": {Every: new(second)},
	} {
		require.ErrorIs(t, m.Override(t0, model.BucketID{Policy: name, Key: "k"}, n, time.Time{}), model.InvalidArgument, name)
	}
}

var quota = model.BucketID{Policy: "quota", Key: "k"}

// aMonth has a month of 1,000 tokens, which begins at midnight in Berlin.
func aMonth(t require.TestingT) *model.Model {
	m := newModel(t)
	require.NoError(t, m.Define("quota", model.Definition{
		Period: &monthly, Numbers: model.Numbers{Capacity: new(int64(1000)), Zone: new("Europe/Berlin")}, Remember: new(7 * 24 * 3600 * second),
	}))
	return m
}

var turn = time.Date(2024, 3, 31, 22, 0, 0, 0, time.UTC)

func TestQuota(t *testing.T) {
	t.Parallel()
	m := aMonth(t)
	ask := func(now time.Time, cost int64) model.Decision {
		d, err := m.Acquire(now, quota, cost, "")
		require.NoError(t, err)
		return d
	}
	until := func(now time.Time) model.Micros { return model.Micros(turn.Sub(now).Microseconds()) }
	before := turn.Add(-time.Microsecond)
	require.Equal(t, allowed(200, until(t0), 1000), ask(t0, 800))
	require.Equal(t, denied(200, until(t0), until(t0), 1000), ask(t0, 201))
	require.Equal(t, denied(200, model.Never, until(t0), 1000), ask(t0, 1001))
	require.Equal(t, denied(200, 1, 1, 1000), ask(before, 1000))

	define := func(def model.Definition) { require.NoError(t, m.Define("quota", def)) }
	define(model.Definition{Numbers: model.Numbers{Capacity: new(int64(5000))}})
	require.Equal(t, allowed(4200, until(t0), 5000), ask(t0, 0))
	define(model.Definition{Numbers: model.Numbers{Capacity: new(int64(500))}})
	require.Equal(t, denied(-300, until(t0), until(t0), 500), ask(t0, 1))
	require.Equal(t, allowed(0, model.Micros(30*24*3600)*second, 500), ask(turn, 500))
	require.Equal(t, denied(0, model.Micros(30*24*3600)*second+until(t0), model.Micros(30*24*3600)*second+until(t0), 500), ask(t0, 1), "a clock that went back")

	define(model.Definition{Numbers: model.Numbers{Anchor: new(time.Date(2024, 4, 1, 0, 0, 0, 0, time.UTC))}})
	require.EqualValues(t, 0, ask(turn.Add(time.Hour), 0).Remaining, "the turn of the anchor was the last write")
	define(model.Definition{Numbers: model.Numbers{Anchor: new(time.Date(2024, 4, 1, 0, 30, 0, 0, time.UTC))}})
	require.EqualValues(t, 500, ask(turn.Add(time.Hour), 0).Remaining)
}

// An override's zone and anchor are its own until it ends, and stay where the next override names none.
func TestQuota_Override(t *testing.T) {
	t.Parallel()
	m := aMonth(t)
	expires := t0.Add(24 * time.Hour)
	override := func(n model.Numbers) { require.NoError(t, m.Override(t0, quota, n, expires)) }
	override(model.Numbers{Capacity: new(int64(0)), Zone: new("Pacific/Auckland")})
	d, err := m.Acquire(t0, quota, 1000, "")
	require.NoError(t, err)
	require.Equal(t, denied(0, 24*3600*second, 0, 0), d, "a block says when it ends")

	override(model.Numbers{Anchor: &t0})
	o := m.Overrides()[quota]
	require.Equal(t, model.Override{Capacity: 1000, Zone: "Pacific/Auckland", Anchor: t0, Expires: expires}, o)
	_, err = m.Acquire(t0, quota, 1000, "")
	require.NoError(t, err)
	d, err = m.Peek(t0, quota, 1)
	require.NoError(t, err)
	require.Equal(t, denied(0, model.Micros(turn.Sub(t0).Microseconds()), model.Micros(turn.Sub(t0).Microseconds()), 1000), d, "its turn comes after it ends")

	require.NoError(t, m.Override(expires, quota, model.Numbers{}, time.Time{}))
	require.Equal(t, "Europe/Berlin", m.Overrides()[quota].Zone, "the earlier one had ended")
}
