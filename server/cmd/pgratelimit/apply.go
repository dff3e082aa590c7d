package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

func (p *program) apply() *cobra.Command {
	var c *cobra.Command
	c = policyfile.Command(func(ctx context.Context) (*pgx.Conn, error) { return p.connect(ctx, c.ErrOrStderr()) })
	c.Args = exactly(1)
	apply := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		err := apply(c, args)
		if errors.Is(err, policyfile.ErrDifference) {
			return answerNo{}
		}
		return err
	}
	return c
}
