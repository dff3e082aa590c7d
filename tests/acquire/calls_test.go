package acquire

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

func count(decisions []kit.Decision, which func(kit.Decision) bool) (n int) {
	for _, d := range decisions {
		if which(d) {
			n++
		}
	}
	return n
}

func isAllowed(d kit.Decision) bool { return d.Allowed }

// startBatch sends requests in one call that may wait for other sessions. The answers are there when the call is over.
func startBatch[R, A any](s *kit.Session, send func(kit.RowsQuerier, []R) ([]A, error), requests ...R) (call *kit.Pending, answers *[]A) {
	answers = new([]A)
	return s.Start(func(kit.Querier) (_ kit.Decision, err error) {
		if *answers, err = send(s, requests); err == nil && len(*answers) != len(requests) {
			err = fmt.Errorf("%d requests have %d answers", len(requests), len(*answers))
		}
		return kit.Decision{}, err
	}), answers
}

// acquireEach sends requests one by one, in a savepoint each.
func acquireEach(tx pgx.Tx, requests []kit.NullableRequest) (answers []kit.Answer, err error) {
	for _, r := range requests {
		var a kit.Answer
		err := pgx.BeginFunc(context.Background(), tx, func(tx pgx.Tx) error {
			d, err := r.Acquire(tx)
			a.Decision = &d
			return err
		})
		if e := kit.PgError(err); e != nil {
			a = kit.Answer{Error: fmt.Sprintf("%s: %s: %s: %s", e.Code, e.Message, e.Detail, e.Hint)}
		} else if err != nil {
			return nil, err
		}
		answers = append(answers, a)
	}
	return answers, nil
}
