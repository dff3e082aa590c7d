//go:build !linux

package main

import "errors"

func separate(...int) (back func(), err error) {
	return nil, errors.New("callers and server cannot have cores of their own: this is not Linux")
}

func newSleeper() (sleeper, error) { return goSleeper{}, nil }
